"""The session of a store with its servers: what is checked before the first use, and what is trusted afterwards."""
