const NAME = /^(?!\.{1,2}$)[A-Za-z0-9_.:@-]{1,128}$/
const ID = /^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,128}$/u

/** Returns a UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, then random bits. */
export function newEventId(): string {
  const bytes = new Uint8Array(16)
  if (globalThis.crypto) crypto.getRandomValues(bytes)
  else bytes.forEach((_, place) => (bytes[place] = Math.random() * 256)) // Node 18 has no global crypto
  const now = Date.now()
  for (let place = 0; place < 6; place++) bytes[place] = Math.floor(now / 2 ** (8 * (5 - place))) & 0xff
  bytes[6] = 0x70 | (bytes[6]! & 0x0f)
  bytes[8] = 0x80 | (bytes[8]! & 0x3f)
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")
  return [hex.slice(0, 8), hex.slice(8, 12), hex.slice(12, 16), hex.slice(16, 20), hex.slice(20)].join("-")
}

/** Throws a TypeError unless the value is a valid id. */
export function requireId(name: string, value: unknown): void {
  if (typeof value !== "string") throw new TypeError(`${name} must be a string, not ${typeof value}`)
  if (!ID.test(value) || value === "." || value === "..") {
    throw new TypeError(`${name} must be 1 to 128 characters, not . or .., without control characters`)
  }
}

/** Throws a TypeError unless the value is a valid type of events. */
export function requireType(value: unknown): void {
  if (typeof value !== "string" || !NAME.test(value)) {
    throw new TypeError("type must be 1 to 128 letters, digits or characters of _.:@-, not . or ..")
  }
}

/** Throws a TypeError if an object has other fields, such as recommendation_id for recommendationId. */
export function requireFields(given: object, known: readonly string[]): void {
  const unknown = Object.keys(given).find((name) => !known.includes(name))
  if (unknown !== undefined) throw new TypeError(`${unknown} is not an option; the options are ${known.join(", ")}`)
}

/** Returns the base URL without a trailing slash; throws a TypeError if it is invalid. */
export function addressOf(url: string): string {
  let address: URL
  try {
    address = new URL(url)
  } catch {
    throw new TypeError(`${JSON.stringify(url)} is not a valid URL; include the scheme, as in https://recs.shop.example`)
  }
  if (!/^https?:$/.test(address.protocol) || !address.host) {
    throw new TypeError(`${JSON.stringify(url)} is not a valid base URL; write it like https://recs.shop.example`)
  }
  if (address.search || address.hash || address.pathname.split("/").includes("v1")) {
    throw new TypeError(`${JSON.stringify(url)} is not a valid base URL; remove /v1, the query string and the fragment`)
  }
  return address.href.replace(/\/$/, "")
}
