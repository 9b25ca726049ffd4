/** Requests and responses of the service, as `/openapi.json` describes them. */

/** The fields of a request for recommendations, as in `POST /v1/recommendations`. */
export interface RecommendationRequest {
  user_id?: string | null
  history?: string[] | null
  state?: string | null
  k?: number
  mode?: "next" | "repeat"
  scenario?: string | null
  params?: Record<string, number | boolean | string | number[] | string[]>
  current_item?: string | null
  categories?: string[]
  categories_all?: string[]
  categories_none?: string[]
  exclude?: string[]
  exclude_seen?: "none" | "recent" | "all"
  exclude_events?: string[]
  within?: string | null
  candidates?: string[] | null
  filter?: string | null
  boost?: Record<string, number> | string | string[]
  pin?: { item_id: string; place: number }[]
  objective?: { property: string; strength: number } | string | null
  diversity?: number
  rotation?: number
  rotation_days?: number
  max_per_category?: number | null
  max_per?: Record<string, number>
  basket?: string[]
  basket_only?: boolean
  because?: string | null
  cursor?: string | null
  explain?: boolean
  debug?: boolean
}

/** An item of a list. */
export interface ScoredItem {
  item_id: string
  score: number
  title?: string
  /** The request or the scenario has put it at this place. */
  pinned?: true
  /** Only the scenario's `fallback` allows it. */
  fallback?: true
  /** No model has learned it yet. */
  cold?: boolean
  /** How the user buys it, with `mode` `repeat`. */
  repeat?: { times: number; last_days: number; interval_days: number }
  /** The parts of the score, with `explain`. */
  explanation?: Record<string, unknown>
}

/** An item of the service's list, or of the fallback, which has only ids. */
export type RecommendedItem = Pick<ScoredItem, "item_id"> & Partial<ScoredItem>

/** A list from the service, or the fallback. Pass its `recommendation_id` with the events that result from it. */
export interface Recommendations<Item = ScoredItem> {
  items: Item[]
  source: "personalised" | "popular" | "blended" | "similar" | "together" | "repeat" | "fallback"
  recommendation_id: string | null
  user_id?: string | null
  generation?: string
  scenario?: string
  experiment?: string
  seen_events_limit?: number
  /** The cursor of the next page, if the request was for pages; null on the last page. */
  cursor?: string | null
  /** The item that these are similar to. */
  because?: { item_id: string; title?: string }
  /** Why there are fewer than k items. */
  short?: { reason: string; left: number; current_item?: "missing" | "unknown" }
  /** How many items each part of the request removed, with `debug`. */
  debug?: { items: number; removed: { part: string; condition?: string; items: number }[]; left: number }
}

/** An event, as in `POST /v1/events`. */
export interface EventToPost {
  event_id: string
  user_id: string
  item_id?: string
  items?: string[]
  type?: string
  timestamp?: number | string
  value?: number
  recommendation_id?: string
  order_id?: string
}

/** A result of a search. */
export interface FoundItem {
  item_id: string
  title: string
  categories: string[]
  available?: boolean
  known?: boolean
}

/** The active model. */
export interface ServedModel {
  generation: string
  tag: string
  device: string
  items: number
  state_bytes: number
}

/** A problem with one part of a request. */
export interface ErrorDetail {
  reason: string
  field?: string | null
  /** The position in the batch, counted from 0. */
  index?: number | null
}
