"""The store on Redis, Valkey and their clusters."""
