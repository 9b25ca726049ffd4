import { isTransient, LisarecError, notLisarec, parsed, unreachable } from "./errors.js"
import type { EventToPost } from "./schemas.js"

const BATCH_SIZE = 100 // the most that a page key may send in one request
const MAX_KEPT_ALIVE = 60_000 // bytes; browsers limit what they send after the user leaves the page
const MIN_PAUSE_MS = 100
const MAX_PAUSE_MS = 30_000
const MAX_BEHIND_MS = 300_000 // as far as the service allows a clock to be ahead

export type Post = (path: string, body: string, options: RequestInit) => Promise<Response>

interface Queued {
  event: EventToPost
  /** Unix seconds, by this machine's clock. */
  time: number
}

/**
 * A bounded queue of events. It sends them in order, and retries with the same ids until the service has logged them.
 *
 * An event without a timestamp gets the time at which it is queued; once this machine's clock turns out to be wrong,
 * that at which it arrives.
 */
export class Outbox {
  /** Events that were not queued, because the queue was full or closed. */
  dropped = 0
  /** Events that the service rejected as invalid. */
  refused = 0
  #waiting: Queued[] = []
  #sending: Promise<void> | null = null
  #closed = false
  #batchSize = BATCH_SIZE
  #datesEvents = true
  #refusedAtFlush = 0
  #wake: (() => void) | null = null

  constructor(
    private readonly post: Post,
    private readonly queueSize: number,
    private readonly warn: (message: string) => void,
  ) {}

  /** Queues the event, or drops it if the queue is full. Returns whether it was queued. */
  put(event: EventToPost): boolean {
    if (this.#closed || this.#waiting.length >= this.queueSize) {
      this.dropped++
      this.warn(this.#closed ? "dropping events: the client is closed" : `dropping events: the queue is full (${this.queueSize} events)`)
      return false
    }
    this.#waiting.push({ event, time: Date.now() / 1000 })
    this.#sending ??= this.#sendAll()
    return true
  }

  /** Waits until the queue is empty. Resolves to whether the service has logged all events since the last flush. */
  async flush(timeoutMs: number): Promise<boolean> {
    let timer: ReturnType<typeof setTimeout> | undefined
    const late = new Promise<boolean>((resolve) => (timer = setTimeout(resolve, timeoutMs, true)))
    while (this.#sending) {
      if (await Promise.race([this.#sending.then(() => false), late])) return false
    }
    clearTimeout(timer)
    if (this.#waiting.length) return false
    const allAccepted = this.refused === this.#refusedAtFlush
    this.#refusedAtFlush = this.refused
    return allAccepted
  }

  /** Flushes and closes the queue. */
  async close(timeoutMs: number): Promise<boolean> {
    const allSent = await this.flush(timeoutMs)
    this.#closed = true
    this.#wake?.()
    if (this.#waiting.length) this.warn(`closed with ${this.#waiting.length} unsent events; they are lost`)
    return allSent
  }

  async #sendAll(): Promise<void> {
    await null // events that are queued in one turn of the event loop go into one request
    let pauseMs = MIN_PAUSE_MS
    try {
      while (this.#waiting.length && !this.#closed) pauseMs = await this.#sendOrPause(pauseMs)
    } finally {
      this.#sending = null // here, because an event may come before a caller learns that this has ended
    }
  }

  /** Sends the oldest events, or pauses after a failure. Returns how long to pause after the next one. */
  async #sendOrPause(pauseMs: number): Promise<number> {
    try {
      await this.#send(this.#waiting.slice(0, this.#batchSize))
      return MIN_PAUSE_MS
    } catch (failure) {
      const error = failure instanceof LisarecError ? failure : unreachable(failure)
      this.warn(`events stay queued and are retried: ${error.message}`)
      await this.#pause(error.retryAfterMs ?? pauseMs * (0.5 + Math.random() / 2))
      return Math.min(2 * pauseMs, isTransient(error) ? MAX_PAUSE_MS : 2 * MAX_PAUSE_MS)
    }
  }

  async #send(batch: Queued[]): Promise<void> {
    const sent = batch.map(({ event, time }) => (this.#datesEvents ? { timestamp: time, ...event } : event))
    const body = JSON.stringify(sent)
    const response = await this.post("/v1/events", body, { keepalive: new TextEncoder().encode(body).length < MAX_KEPT_ALIVE })
    if (this.#datesEvents && isClockBehind(response)) this.#leaveTimesToService("behind")
    let counts: Record<string, unknown>
    try {
      counts = await parsed(response)
    } catch (failure) {
      if (!(failure instanceof LisarecError)) throw failure
      const details = failure.status === 422 ? failure.details : []
      const isAhead = (place: number) => Number(sent[place]!.timestamp ?? Infinity) <= batch[place]!.time
      const wrongTimes = new Set(details.map(({ index, field }) => (field === "timestamp" ? index : null)))
      const ahead = batch.filter((_, place) => wrongTimes.has(place) && isAhead(place))
      if (ahead.length) return this.#leaveTimesToService("ahead of", ahead)
      const invalid = new Set(details.map(({ index }) => index))
      const refused = batch.filter((_, place) => invalid.has(place))
      if (refused.length) return this.#drop(refused, failure)
      if (![413, 422].includes(failure.status)) throw failure
      if (batch.length === 1) return this.#drop(batch, failure)
      this.#batchSize = Math.ceil(batch.length / 2)
      return
    }
    const done = ["accepted", "duplicates", "refused"].reduce((sum, name) => sum + (Number(counts[name]) || 0), 0)
    if (done !== batch.length) throw notLisarec(response)
    const refused = Number(counts.refused) || 0
    if (refused) {
      this.refused += refused
      this.warn(`the service rejected ${refused} events, because their items are unknown; import the items first`)
    }
    this.#remove(batch)
    this.#batchSize = Math.min(2 * this.#batchSize, BATCH_SIZE)
  }

  /** Sends these events again without times, and those without timestamps from now on. */
  #leaveTimesToService(clock: string, events: Queued[] = []): void {
    this.#datesEvents = false
    for (const { event } of events) delete event.timestamp
    this.warn(`this clock is 5 minutes or more ${clock} the service's, which now dates events on arrival`)
  }

  #drop(events: Queued[], failure: LisarecError): void {
    this.refused += events.length
    this.warn(`the service rejected ${events.length} events: ${failure.message}`)
    this.#remove(events)
  }

  #remove(events: Queued[]): void {
    const gone = new Set(events)
    this.#waiting = this.#waiting.filter((queued) => !gone.has(queued))
  }

  #pause(forMs: number): Promise<void> {
    return new Promise((resolve) => {
      const timer: unknown = setTimeout(resolve, forMs)
      ;(timer as { unref?: () => void }).unref?.() // an unreachable service must not keep the program alive
      this.#wake = resolve
    })
  }
}

/** Returns whether this machine's clock is far behind the one that dated the response. Pages of other origins can't see that. */
function isClockBehind(response: Response): boolean {
  return Date.parse(response.headers.get("date") ?? "") > Date.now() + MAX_BEHIND_MS
}
