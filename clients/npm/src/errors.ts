import type { ErrorDetail } from "./schemas.js"

const SHOWN_DETAILS = 3 // in a message; `details` has all

/** The service rejected the request, or could not be reached in time (status 0). The message says which. */
export class LisarecError extends Error {
  override readonly name = "LisarecError"

  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly details: readonly ErrorDetail[] = [],
    readonly retryAfterMs: number | null = null,
  ) {
    super(status ? `${status} ${code}: ${[message, ...shown(details)].join("; ")}` : message)
  }
}

function shown(details: readonly ErrorDetail[]): string[] {
  const said = details.slice(0, SHOWN_DETAILS).map(({ index, field, reason }) =>
    [index == null ? "" : `[${index}]`, field ?? "", reason].filter(Boolean).join(" "),
  )
  const more = details.length - said.length
  return more > 0 ? [...said, `and ${more} more`] : said
}

/** The error for a request without a response. */
export function unreachable(cause: unknown): LisarecError {
  const why = cause instanceof Error ? `${cause.message}${cause.cause instanceof Error ? ` (${cause.cause.message})` : ""}` : String(cause)
  return new LisarecError(0, "unreachable", `the service cannot be reached: ${why}`)
}

/** The error for a response that does not come from lisarec. */
export function notLisarec(response: Response): LisarecError {
  const at = response.url.replace(/\?.*/, "")
  return new LisarecError(response.status, "not_lisarec", `the server at ${at} is not lisarec; check the base URL`)
}

/** Whether a retry may help: the service, or a proxy in front of it, may answer a little later. */
export function isTransient(error: LisarecError): boolean {
  return [0, 408, 429, 500, 502, 503, 504].includes(error.status) && !isUnknownHost(error)
}

function isUnknownHost(error: LisarecError): boolean {
  return /\bENOTFOUND\b/.test(error.message) // only Node names the reason
}

/** Returns the JSON object of a successful response; throws a LisarecError for any other response. */
export async function parsed(response: Response): Promise<Record<string, unknown>> {
  let body: any
  try {
    body = await response.json()
  } catch {
    body = undefined
  }
  if (response.ok && typeof body === "object" && body !== null && !Array.isArray(body)) return body
  const retryAfterMs = waitMs(response)
  const error = body?.error
  if (!response.ok && typeof error?.code === "string") {
    const details = Array.isArray(error.details) ? error.details : []
    throw new LisarecError(response.status, error.code, String(error.message), details, retryAfterMs)
  }
  if (response.ok || response.status < 500) throw notLisarec(response)
  throw new LisarecError(response.status, "http_error", response.statusText || "the response comes from a proxy", [], retryAfterMs)
}

/** Returns the milliseconds in `Retry-After`, or null if it is missing or is a date, which only proxies send. */
export function waitMs(response: Response): number | null {
  const seconds = response.headers.get("retry-after")
  return seconds !== null && /^\d+$/.test(seconds) ? Number(seconds) * 1000 : null
}
