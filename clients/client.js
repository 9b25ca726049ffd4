{
let { src, dataset } = document.currentScript, { now } = Date, todo = new Map(), kept = {}, held = 0, until = 0
let warn = why => (warn = isNaN, console.warn("lisarec dropped", why))
try { kept = localStorage || kept } catch {}
for (let name in kept) if (/^lisarec:/.test(name)) kept[name][1e4] ? delete kept[name] : held = todo.set(name, kept[name]).size
let uuid = () => `0${now().toString(16)}`.replace(/....$/, "-$&-7xxx-8xxx-xxxxxxxxxxxx")
	.replace(/x/g, () => (crypto.getRandomValues(new Uint8Array(1)) & 15).toString(16))
let user = () => /(^|; )lisarec=([^;]+)/.exec(document.cookie)?.[2]
let push = event => {
	try {
		if (!user()) document.cookie = `lisarec=visitor-${uuid()};Path=/;Max-Age=31536000;SameSite=Lax${/^https/.test(location) ? ";Secure" : ""}`
		let event_id = uuid(), user_id = user(), name = "lisarec:" + event_id, text = JSON.stringify({ event_id, user_id, ...event })
		if (!user_id || held > 99 || text[1e4]) warn(user_id ? "overflow" : "no cookie")
		else try { todo.set(name, text, held++), kept[name] = text } catch {}
		send()
	} catch (why) { warn(why) }
}
let send = async () => {
	let lot = [...todo].sort().slice(0, 20)
	if (!lot[0] || now() < until) return
	let done = [], body = `[${lot.map(([name, text]) => todo.delete(name) && text)}]`
	try {
		let got = await fetch(new URL("v1/events", src), {
			method: "POST", keepalive: body.length < 2e4, body,
			headers: { Authorization: "Bearer " + dataset.key, "Content-Type": "application/json" }
		})
		until = Math.max(until, now() + 1e3 * (got.headers.get("Retry-After") | 0))
		let { error, refused } = await got.json()
		refused && warn("unknown items")
		if (refused >= 0) done = lot
		if (got.status == 422) done = error.details.map(one => (warn(one), lot[one.index]))
		kept.lisarecEnd = until
	} catch {}
	lot.map(one => done.includes(one) ? delete kept[one[0]] && held-- : todo.set(...one))
	done[0] && send()
}
until = kept.lisarecEnd - now() < 4e6 ? +kept.lisarecEnd : 0
self.lisarec?.forEach?.(push)
lisarec = { push }
setTimeout(send, 1e3)
}
