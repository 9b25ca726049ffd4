// What the package says of requests and answers is what /openapi.json says of them: compiled, never run.
import type { ErrorDetail, EventToPost, FoundItem, Recommendations, RecommendationRequest, ScoredItem, ServedModel } from "lisarec-client"
import type { components, operations } from "./openapi.js"

type Schemas = components["schemas"]
type Is<Narrow extends Wide, Wide> = Narrow

export type Taken = [
  Is<Required<RecommendationRequest>, Schemas["RecommendationRequest"]>,
  Is<EventToPost, Schemas["PostedEvent"]>,
]
export type Answered = [
  Is<Schemas["Recommendations"], Recommendations>,
  Is<Schemas["FoundItem"], FoundItem>,
  Is<Schemas["ErrorDetail"], ErrorDetail>,
  Is<Schemas["ServedModel"], ServedModel>,
]
export type NothingIsMissing = [
  Is<Exclude<keyof Schemas["RecommendationRequest"], keyof RecommendationRequest>, never>,
  Is<Exclude<keyof Schemas["PostedEvent"], keyof EventToPost>, never>,
  Is<Exclude<keyof Schemas["Recommendations"], keyof Recommendations>, never>,
  Is<Exclude<keyof Schemas["ScoredItem"], keyof ScoredItem>, never>,
  Is<Exclude<Schemas["Recommendations"]["source"], Recommendations["source"]>, never>,
]
export type Named = Is<"post_events" | "get_recommendations" | "post_recommendations" | "get_stats", keyof operations>
