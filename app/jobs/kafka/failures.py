"""Failures of reading and writing topics."""


class KafkaFailure(Exception):
    """A permanent failure. The message says what to do."""


class Stopped(Exception):
    """The command was asked to stop."""
