// see browser.md
(() => {
  const { src, dataset } = document.currentScript
  const waiting = new Map()
  let store = {}, quiet
  try { store = localStorage || store } catch {}
  for (const name in store) if (/^lisarec:/.test(name)) waiting.set(name, store[name])
  let held = waiting.size

  function newId() { // UUIDv7
    const time = "0" + Date.now().toString(16)
    const digit = () => (crypto.getRandomValues(new Uint8Array(1))[0] & 15).toString(16)
    return `${time.slice(0, 8)}-${time.slice(8)}-7xxx-8xxx-xxxxxxxxxxxx`.replace(/x/g, digit)
  }

  function visitor() {
    const cookie = () => /(^|; )lisarec=([^;]+)/.exec(document.cookie)?.[2]
    if (!cookie()) document.cookie = `lisarec=visitor-${newId()}; Path=/; Max-Age=31536000; SameSite=Lax` +
      (/^https/.test(location) ? "; Secure" : "")
    return cookie()
  }

  function push(event) {
    const event_id = newId(), user_id = visitor(), name = "lisarec:" + event_id
    if (!user_id || held > 99) return
    held++
    waiting.set(name, JSON.stringify({ event_id, user_id, ...event }))
    try { store[name] = waiting.get(name) } catch {}
    send()
  }

  async function send() {
    const batch = [...waiting].sort().slice(0, 20)
    if (!batch[0] || quiet) return
    batch.map(([name]) => waiting.delete(name))
    let done = []
    try {
      const answer = await fetch(new URL("v1/events", src), {
        method: "POST", keepalive: true, body: `[${batch.map(([, text]) => text)}]`,
        headers: { Authorization: "Bearer " + dataset.key, "Content-Type": "application/json" },
      })
      quiet = answer.headers.get("Retry-After")
      setTimeout(() => quiet = 0, 1e3 * quiet)
      if (answer.ok) done = batch
      if (answer.status == 422) done = (await answer.json()).error.details.map(({ index }) => batch[index])
    } catch {}
    batch.map(entry => done.includes(entry) ? delete store[entry[0]] && held-- : waiting.set(...entry))
    if (done[0]) send()
  }

  self.lisarec?.forEach?.(push)
  self.lisarec = { push }
  setTimeout(send, 1e3)
})()
