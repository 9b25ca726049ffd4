// A shop in Node.js: asks the service at the first argument, with the second as key, and the proxy at the third, which
// fails at first.
import assert from "node:assert/strict"
import { LisarecClient, LisarecError, newEventId } from "lisarec-client"

const [url, key, proxy, user] = process.argv.slice(2)
const said = []
const patient = { key, timeoutMs: 60_000, warn: (message) => said.push(message) }
const shop = new LisarecClient(url, patient)
await shop.check()

// events, and the list that comes of them
for (const n of [1, 2, 3]) assert.match(shop.event(user, `item-${n}`), /^[0-9a-f]{8}-[0-9a-f]{4}-7/)
assert.ok(await shop.flush(60_000))
const answer = await shop.recommendations(user, { k: 4, exclude_seen: "all", exclude: ["item-9"] })
assert.equal(answer.source, "personalised")
assert.equal(answer.items.length, 4)
shop.impression(user, answer.items.map(({ item_id }) => item_id), { recommendationId: answer.recommendation_id })
assert.equal(shop.impression(user, []), null)
assert.throws(() => shop.impression(user, ["item-1", "item-1"]), TypeError)
shop.event(user, answer.items[0].item_id, {
  type: "purchase", value: 9.5, orderId: "order-1", recommendationId: answer.recommendation_id, at: new Date(1e12),
})
assert.ok(await shop.flush(60_000))
assert.equal((await shop.similar("item-1", { k: 3 })).items.length, 3)
assert.equal((await shop.search("thing", { limit: 2, userId: user })).length, 2)
const oddUser = "\u{1f375}".repeat(127) + "m", oddItem = "a/b?c#100% <Größe 42>"
await shop.call("PUT", `/v1/items/${encodeURIComponent(oddItem)}`, { title: "odd" })
assert.ok(shop.event(oddUser, oddItem, { eventId: "x y/z", orderId: "商品 1" }))
assert.ok(await shop.flush(60_000))
const log = await shop.call("GET", `/v1/users/${encodeURIComponent(oddUser)}/events`)
assert.deepEqual(log.events.map(({ event_id, item_id }) => [event_id, item_id]), [["x y/z", oddItem]])
await assert.rejects(shop.similar(oddItem), { code: "item_not_found" }) // no model has learned it
assert.deepEqual(said, [])

// what the service refuses
const refusal = await shop.call("POST", "/v1/events", [
  { event_id: newEventId(), user_id: user, item_id: "item-1" },
  { event_id: newEventId(), user_id: user, item_id: "no such id\n" },
]).catch((error) => error)
assert.ok(refusal instanceof LisarecError)
assert.deepEqual([refusal.status, refusal.code, refusal.details[0].index], [422, "invalid_events", 1])
assert.match(refusal.message, /; \[1\] item_id /)
shop.event(user, "item-4", { orderId: "no such order\n" })
shop.event(user, "item-5")
assert.equal(await shop.flush(60_000), false)
assert.equal(shop.outbox.refused, 1)
assert.match(said.pop(), /the service rejected 1 events: 422 invalid_events/)
shop.event(user, "item-4", { orderId: "no such order\n" })
while (shop.outbox.refused < 2) await new Promise((resolve) => setTimeout(resolve, 10)) // refused before the flush
assert.equal(await shop.flush(60_000), false)
assert.equal(await shop.flush(60_000), true)
said.pop()

// a clock that is wrong
for (const wrongByMs of [3_600_000, -3_600_000]) {
  const { now } = Date, wrongUser = `${user}-clock${wrongByMs}`, warnings = []
  const wrong = new LisarecClient(url, { ...patient, warn: (message) => warnings.push(message) })
  Date.now = () => now() + wrongByMs
  await wrong.recommendations(wrongUser)
  wrong.event("somebody", "item-1")
  assert.ok(await wrong.flush(60_000))
  wrong.event(wrongUser, "item-1")
  wrong.event(wrongUser, "item-2", { at: new Date(1e12) })
  wrong.event(wrongUser, "item-3")
  assert.ok(await wrong.flush(60_000))
  if (wrongByMs > 0) wrong.event(wrongUser, "item-4", { at: new Date(Date.now()) }) // by the same clock
  assert.ok(await wrong.close(60_000))
  Date.now = now
  const { events } = await shop.call("GET", `/v1/users/${encodeURIComponent(wrongUser)}/events`)
  assert.deepEqual(events.map(({ item_id }) => item_id).slice(0, 3), ["item-1", "item-2", "item-3"])
  const [, own, ...others] = events.map(({ timestamp }) => timestamp)
  assert.equal(own, 1e9)
  for (const timestamp of others) assert.ok(Math.abs(timestamp - now() / 1000) < 1_800)
  assert.equal(wrong.outbox.refused, 0)
  assert.equal(warnings.length, 1)
  assert.notEqual((await wrong.recommendations(wrongUser)).source, "fallback") // now that the clock is right
}

// an event that is queued a few microtasks after an answer, as the queue empties
const lateUser = `${user}-late`, { fetch } = globalThis
for (let microtasks = 0; microtasks < 20; microtasks++) {
  const queued = new Promise((resolve) => {
    globalThis.fetch = async (...request) => {
      globalThis.fetch = fetch
      const response = await fetch(...request), body = await response.json()
      response.json = async () => {
        let turn = Promise.resolve()
        for (let n = 0; n < microtasks; n++) turn = turn.then(() => {})
        turn.then(() => resolve(shop.event(lateUser, "item-2")))
        return body
      }
      return response
    }
  })
  shop.event(lateUser, "item-1")
  assert.ok(await queued)
  assert.ok(await shop.flush(60_000), `lost after ${microtasks} microtasks`)
}
const lateLog = await shop.call("GET", `/v1/users/${encodeURIComponent(lateUser)}/events?limit=1000`)
assert.equal(lateLog.events.length, 40)

// a service that fails: the fallback in time, and each event once
const failing = new LisarecClient(proxy, { ...patient, timeoutMs: 200 })
const list = await failing.recommendations(user, { k: 2, fallback: ["item-1", "item-2", "item-3"] })
assert.deepEqual(list.items.map(({ item_id }) => item_id), ["item-1", "item-2"])
assert.equal(list.source, "fallback")
for (let n = 10; n < 20; n++) failing.event(user, `item-${n}`)
assert.ok(await failing.close(60_000))
assert.equal(failing.event(user, "item-1"), null)
assert.equal(failing.outbox.dropped, 1)

// an outage is reported once a minute, by each of its messages
const reports = []
const lost = new LisarecClient("http://127.0.0.1:9", { ...patient, queueSize: 1, warn: (message) => reports.push(message) })
const seePage = async () => [await lost.recommendations(user), lost.event(user, "item-1")]
for (let n = 0; n < 3; n++) await seePage()
assert.equal(new Set(reports).size, reports.length)
const fallbacks = () => reports.filter((message) => message.startsWith("returning the fallback")).length
assert.equal(fallbacks(), 1)
const { now } = Date
Date.now = () => now() + 60_000
await seePage()
Date.now = now
assert.equal(fallbacks(), 2)
await lost.close(1)

// what could never work fails at once
for (const wrong of ["recs.shop.example", "ftp://shop.example", `${url}/v1`, ""]) {
  assert.throws(() => new LisarecClient(wrong), TypeError)
}
assert.throws(() => new LisarecClient(url, { key: "not\na key" }), TypeError)
assert.throws(() => shop.event("no such user\n", "item-1"), TypeError)
assert.throws(() => shop.event("half \ud83d", "item-1"), TypeError)
assert.throws(() => shop.event(user, 42), { name: "TypeError", message: "itemId must be a string, not number" })
assert.throws(() => shop.event(user, "item-1", { type: "no such type!" }), TypeError)
for (const at of [new Date("no date"), "2026-01-01T00:00:00Z", 1e12]) {
  assert.throws(() => shop.event(user, "item-1", { at }), { name: "TypeError", message: "at must be a valid Date" })
}
for (const [path, body] of [["v1/stats"], ["/v1/events", { value: 1n }]]) {
  await assert.rejects(shop.call("POST", path, body), TypeError) // and not ten seconds later as unreachable
}
for (const unknown of [{ recommendation_id: "x" }, { recommendationID: undefined }]) {
  assert.throws(() => shop.event(user, "item-1", unknown), /TypeError: recommendation_?id is not an option/i)
  assert.throws(() => shop.impression(user, ["item-1"], unknown), TypeError)
}
await assert.rejects(new LisarecClient(url, { ...patient, key: "lisarec_no-key" }).check(), { status: 401 })
const begin = Date.now()
await assert.rejects(new LisarecClient("http://no-such-host.invalid", patient).call("GET", "/v1/model"), { code: "unreachable" })
assert.ok(Date.now() - begin < 10_000)
await shop.close()
