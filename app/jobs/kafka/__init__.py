"""Events from and for topics of Apache Kafka, and of every broker that speaks its protocol."""
