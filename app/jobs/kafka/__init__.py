"""Reads events from topics, and publishes the log to one: Apache Kafka, and every broker that speaks its protocol."""
