"""The schemas of requests and answers, one file for each resource: docs/reference/http-api.md describes them."""
