export { LisarecClient } from "./client.js"
export type { ClientOptions, EventOptions, ImpressionOptions, RecommendationOptions } from "./client.js"
export { LisarecError } from "./errors.js"
export { newEventId } from "./ids.js"
export type {
  ErrorDetail,
  EventToPost,
  FoundItem,
  Recommendations,
  RecommendationRequest,
  RecommendedItem,
  ScoredItem,
  ServedModel,
} from "./schemas.js"
