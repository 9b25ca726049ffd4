import { isTransient, LisarecError, notLisarec, parsed, unreachable, waitMs } from "./errors.js"
import { addressOf, newEventId, requireFields, requireId, requireType } from "./ids.js"
import { Outbox } from "./outbox.js"
import type { EventToPost, FoundItem, RecommendationRequest, Recommendations, RecommendedItem } from "./schemas.js"

const RETRY_FOR_MS = 10_000 // for everything but recommendations
const FIRST_PAUSE_MS = 100
const QUIET_FOR_MS = 60_000 // after a warning; in an outage every page has the same
const OF_IMPRESSIONS = ["recommendationId"]
const OF_EVENTS = ["type", "value", "recommendationId", "orderId", "at", "eventId"]

export interface ClientOptions {
  /** An API key, made by `lisarec keys add`. In a browser, restrict it to `events:write` or `portable` and to your origins: everyone can read it. */
  key?: string | undefined
  /** The timeout of recommendations in milliseconds. Default: 250. */
  timeoutMs?: number | undefined
  /** The largest number of queued events. Default: 10,000. */
  queueSize?: number | undefined
  /** Receives warnings: the same message at most once a minute. Default: `console.warn`. */
  warn?: ((message: string) => void) | undefined
}

/** An option may be undefined, also where `exactOptionalPropertyTypes` is set. */
type OrUndefined<Options> = { [Name in keyof Options]: Options[Name] | undefined }

export interface RecommendationOptions extends OrUndefined<Omit<RecommendationRequest, "user_id">> {
  /** The items to return if the service doesn't answer in time, best first. */
  fallback?: readonly string[] | undefined
  timeoutMs?: number | undefined
}

export interface EventOptions {
  type?: string | undefined
  /** The value of the event, such as the price paid; 0 or greater. */
  value?: number | undefined
  recommendationId?: string | null | undefined
  orderId?: string | undefined
  /** The time of the event. Default: now. */
  at?: Date | undefined
  eventId?: string | undefined
}

export interface ImpressionOptions {
  recommendationId?: string | null | undefined
}

/**
 * A client of one service. Create one per process or page.
 *
 * Recommendations never reject and never exceed their timeout: if the service is down, slow or overloaded, they resolve
 * to the fallback. Events never block: they are queued, and sent in the background until the service has logged them.
 */
export class LisarecClient {
  /** The queue of events, with the counters `dropped` and `refused`. */
  readonly outbox: Outbox
  readonly #url: string
  readonly #headers: Record<string, string>
  readonly #timeoutMs: number
  readonly #warn: (message: string) => void
  #pauseUntil = 0 // as performance.now() counts: a clock that is set back must not prolong a pause
  readonly #quietUntil = new Map<string, number>() // by message

  /** Throws a TypeError if an argument is invalid. */
  constructor(url: string, options: ClientOptions = {}) {
    this.#url = addressOf(url)
    this.#headers = { "content-type": "application/json" }
    if (options.key !== undefined) {
      if (!/^[!-~]+$/.test(options.key)) throw new TypeError("the key is empty or contains an invalid character")
      this.#headers.authorization = `Bearer ${options.key}`
    }
    this.#timeoutMs = positive("timeoutMs", options.timeoutMs ?? 250)
    this.#warn = options.warn ?? ((message) => console.warn(`lisarec: ${message}`))
    const post = (path: string, body: string, rest: RequestInit) =>
      this.#fetch("POST", path, { body, signal: AbortSignal.timeout(RETRY_FOR_MS), ...rest })
    this.outbox = new Outbox(post, positive("queueSize", options.queueSize ?? 10_000), (message) => this.#say(message))
  }

  /** Returns the user's best items, or the first k items of the fallback. Never rejects. */
  async recommendations(userId: string | null, options: RecommendationOptions = {}): Promise<Recommendations<RecommendedItem>> {
    const { fallback = [], timeoutMs = this.#timeoutMs, ...wishes } = options
    try {
      if (performance.now() < this.#pauseUntil) throw new LisarecError(0, "silent", "no request was sent, because the service asked for a pause (Retry-After)")
      const body = JSON.stringify(userId === null ? wishes : { user_id: userId, ...wishes })
      const signal = AbortSignal.timeout(timeoutMs)
      const response = await this.#fetch("POST", "/v1/recommendations", { body, signal })
      this.#pauseUntil = performance.now() + (waitMs(response) ?? 0)
      const answer = (await parsed(response)) as unknown as Recommendations
      if (!Array.isArray(answer.items)) throw notLisarec(response)
      return answer
    } catch (failure) {
      const error = failure instanceof LisarecError ? failure : unreachable(failure)
      this.#say(`returning the fallback: ${error.message}`)
      const items = fallback.slice(0, options.k ?? 10).map((item_id) => ({ item_id }))
      return { items, source: "fallback", recommendation_id: null }
    }
  }

  /** Queues an event and returns its id at once. If the queue is full, drops the event and returns null. */
  event(userId: string, itemId: string, options: EventOptions = {}): string | null {
    requireFields(options, OF_EVENTS)
    requireId("itemId", itemId)
    const type = options.type ?? "click"
    requireType(type)
    return this.#put({ user_id: userId, item_id: itemId, type }, options)
  }

  /** Queues an impression: the items that the user has actually seen, for `rotation`. Returns its id, as `event` does; null for no items. */
  impression(userId: string, items: readonly string[], options: ImpressionOptions = {}): string | null {
    requireFields(options, OF_IMPRESSIONS)
    if (items.length === 0) return null // an outage without a fallback must not break the page
    if (items.length > 50 || new Set(items).size < items.length) {
      throw new TypeError("an impression must have 1 to 50 different items")
    }
    for (const itemId of items) requireId("items", itemId)
    return this.#put({ user_id: userId, items: [...items], type: "impression" }, options)
  }

  /** Returns the items whose titles or ids match the query: best match first, or ranked for the user if given. */
  async search(query: string, options: { userId?: string | undefined; limit?: number | undefined } = {}): Promise<FoundItem[]> {
    const asked = new URLSearchParams({ query, limit: String(options.limit ?? 20) })
    if (options.userId !== undefined) asked.set("user_id", options.userId)
    return (await this.call<{ items: FoundItem[] }>("GET", `/v1/items?${asked}`)).items
  }

  /** Returns the items that are most similar to an item. */
  async similar(itemId: string, options: { k?: number | undefined } = {}): Promise<Recommendations> {
    requireId("itemId", itemId)
    return this.call("GET", `/v1/items/${encodeURIComponent(itemId)}/similar?k=${options.k ?? 10}`)
  }

  /** Checks once, without retries, that the service is ready and accepts the key; rejects with a LisarecError if not. Call it at startup. */
  async check(): Promise<void> {
    const ready = await this.#once("GET", "/readyz")
    if (ready.status !== "ready") throw new LisarecError(200, "not_lisarec", `the server at ${this.#url} is not lisarec; check the base URL`)
    try {
      await this.#once("GET", "/v1/model")
    } catch (failure) {
      if (!(failure instanceof LisarecError && failure.code === "forbidden")) throw failure // the key is valid, but has another scope
    }
  }

  /** Calls any other endpoint, such as `call("GET", "/v1/stats")`, with retries for ten seconds; then rejects with a LisarecError. */
  async call<Answer = Record<string, unknown>>(method: string, path: string, body?: unknown): Promise<Answer> {
    if (!path.startsWith("/")) throw new TypeError(`the path must begin with a slash, as in /v1/stats: ${path}`)
    const text = body === undefined ? undefined : JSON.stringify(body)
    const giveUpAt = performance.now() + RETRY_FOR_MS
    for (let pauseMs = FIRST_PAUSE_MS; ; pauseMs *= 2) {
      try {
        return (await this.#once(method, path, text, Math.ceil(giveUpAt - performance.now()))) as Answer
      } catch (failure) {
        const error = failure instanceof LisarecError ? failure : unreachable(failure)
        const waitFor = error.retryAfterMs ?? pauseMs * (0.5 + Math.random() / 2)
        if (!isTransient(error) || performance.now() + waitFor >= giveUpAt) throw error
        await new Promise((resolve) => setTimeout(resolve, waitFor))
      }
    }
  }

  /** Waits until the queue is empty. Resolves to whether the service has logged all events since the last flush. */
  flush(timeoutMs = RETRY_FOR_MS): Promise<boolean> {
    return this.outbox.flush(timeoutMs)
  }

  /** Flushes the queue and closes the client. Call it before the program exits. */
  close(timeoutMs = RETRY_FOR_MS): Promise<boolean> {
    return this.outbox.close(timeoutMs)
  }

  #put(event: Omit<EventToPost, "event_id">, options: EventOptions): string | null {
    requireId("userId", event.user_id)
    const whole: EventToPost = { ...event, event_id: options.eventId ?? newEventId() }
    const { at } = options
    if (at != null) {
      if (!(at instanceof Date && Number.isFinite(at.getTime()))) throw new TypeError("at must be a valid Date")
      whole.timestamp = at.getTime() / 1000
    }
    if (options.value !== undefined) {
      if (!(options.value >= 0 && Number.isFinite(options.value))) throw new TypeError("value must be a number, 0 or greater")
      whole.value = options.value
    }
    if (options.recommendationId) whole.recommendation_id = options.recommendationId
    if (options.orderId !== undefined) whole.order_id = options.orderId
    return this.outbox.put(whole) ? whole.event_id : null
  }

  async #once(method: string, path: string, body?: string, timeoutMs = RETRY_FOR_MS): Promise<Record<string, unknown>> {
    const rest = body === undefined ? {} : { body }
    try {
      return await parsed(await this.#fetch(method, path, { signal: AbortSignal.timeout(Math.max(timeoutMs, 1)), ...rest }))
    } catch (failure) {
      throw failure instanceof LisarecError ? failure : unreachable(failure)
    }
  }

  #fetch(method: string, path: string, rest: RequestInit): Promise<Response> {
    return fetch(this.#url + path, { method, headers: this.#headers, ...rest })
  }

  #say(message: string): void {
    const now = Date.now()
    for (const [said, until] of this.#quietUntil) if (until <= now) this.#quietUntil.delete(said)
    if (this.#quietUntil.has(message)) return
    this.#quietUntil.set(message, now + QUIET_FOR_MS)
    this.#warn(message)
  }
}

function positive(name: string, value: number): number {
  if (!(value > 0)) throw new TypeError(`${name} must be greater than 0`)
  return value
}
