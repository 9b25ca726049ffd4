"""The schemas of requests and answers, one file for each resource."""
