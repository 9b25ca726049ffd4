// A shop in TypeScript, as strict as the compiler can be: compiled, never run.
import { LisarecClient } from "lisarec-client"

export async function show(key: string | undefined, user: string | undefined): Promise<(string | undefined)[]> {
  const lisarec = new LisarecClient("https://recs.shop.example", { key, warn: undefined })
  const answer = await lisarec.recommendations(user ?? null, { k: 5, scenario: user, fallback: undefined, debug: true })
  lisarec.event("ann", "tea-2", { value: undefined, orderId: undefined, recommendationId: answer.recommendation_id })
  lisarec.impression("ann", ["tea-2"], { recommendationId: undefined })
  const similar = await lisarec.similar("tea-2", { k: undefined })
  const found = await lisarec.search("tea", { userId: user })
  const parts = answer.debug?.removed.map(({ part, condition }) => condition ?? part) ?? []
  return [...answer.items.map(({ title, item_id }) => title ?? item_id), similar.items[0]?.title, found[0]?.title, ...parts]
}
