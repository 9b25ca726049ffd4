// The service over HTTP, as every other client of it has it.

export class Refused extends Error {
  constructor(status, message, details = []) {
    super(message);
    this.status = status;
    this.details = details;
  }
}

const KEY = "lisarec.key";
const TIMEOUT_MS = 30_000;

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export const useKey = (key) => sessionStorage.setItem(KEY, key);

/** What the service answers: JSON, or text where it is none; what it says of the time it took; raises Refused. */
export async function call(method, path, body) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const { answer, text } = await received(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const isJson = (answer.headers.get("content-type") ?? "").startsWith("application/json");
  const data = isJson ? JSON.parse(text) : text;
  if (!answer.ok) {
    throw new Refused(answer.status, data.error?.message ?? `the service answered ${answer.status}`, data.error?.details);
  }
  return { data, spans: spansOf(answer.headers.get("server-timing") ?? "") };
}

/** What arrives, in full; raises Refused where nothing does in time. */
async function received(path, request) {
  try {
    const answer = await fetch(path, { ...request, signal: AbortSignal.timeout(TIMEOUT_MS) });
    return { answer, text: await answer.text() };
  } catch (error) {
    const isLate = error.name === "TimeoutError";
    throw new Refused(0, isLate ? "the service does not answer; try again" : "the service cannot be reached; is it running?");
  }
}

/** [name, milliseconds] of each step that the header names. */
function spansOf(serverTiming) {
  return [...serverTiming.matchAll(/([\w-]+);dur=([\d.]+)/g)].map(([, name, ms]) => [name, Number(ms)]);
}

export function uuid7() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  new DataView(bytes.buffer).setUint32(0, Math.floor(Date.now() / 2 ** 16));
  new DataView(bytes.buffer).setUint16(4, Date.now() % 2 ** 16);
  bytes[6] = (bytes[6] & 0x0f) | 0x70;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}
