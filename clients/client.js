{
  let { src, dataset } = document.currentScript, waiting = new Map(), store = {}, held = 0, quiet
  let warn = why => (warn = Boolean, console.warn("lisarec dropped", why))
  try { store = localStorage || store } catch {}
  for (const name in store) if (/^lisarec:/.test(name)) held = waiting.set(name, store[name]).size

  let newId = () => `0${Date.now().toString(16)}`.replace(/....$/, "-$&-7xxx-8xxx-xxxxxxxxxxxx") // UUIDv7
    .replace(/x/g, () => (crypto.getRandomValues(new Uint8Array(1))[0] & 15).toString(16))

  let visitor = () => /(^|; )lisarec=([^;]+)/.exec(document.cookie)?.[2]

  let push = event => {
    if (!visitor()) document.cookie = `lisarec=visitor-${newId()}; Path=/; Max-Age=31536000; SameSite=Lax${/^https/.test(location) ? "; Secure" : ""}`
    let event_id = newId(), user_id = visitor(), name = "lisarec:" + event_id
    if (!user_id || held > 99) return send(warn(user_id ? "overflow" : "no cookie"))
    held++
    waiting.set(name, JSON.stringify({ event_id, user_id, ...event }))
    try { store[name] = waiting.get(name) } catch {}
    send()
  }

  let send = async () => {
    let batch = [...waiting].sort().slice(0, 20)
    if (!batch[0] || quiet) return
    batch.map(([name]) => waiting.delete(name))
    let done = []
    try {
      let answer = await fetch(new URL("v1/events", src), {
        method: "POST", keepalive: 1, body: `[${batch.map(([, text]) => text)}]`,
        headers: { Authorization: "Bearer " + dataset.key, "Content-Type": "application/json" }
      })
      setTimeout(() => quiet = 0, 1e3 * (quiet = answer.headers.get("Retry-After")))
      if (answer.ok) done = batch
      let { error, refused } = await answer.json()
      refused && warn("unknown items")
      if (answer.status == 422) done = error.details.map(one => (warn(one), batch[one.index]))
    } catch {}
    batch.map(one => done.includes(one) ? delete store[one[0]] && held-- : waiting.set(...one))
    done[0] && send()
  }

  self.lisarec?.forEach?.(push)
  self.lisarec = { push }
  setTimeout(send, 1e3)
}
