"""How reading and writing topics ends before its time."""


class KafkaFailure(Exception):
    """Something that waiting does not mend; the message says what to do."""


class Stopped(Exception):
    """The command was told to end."""
