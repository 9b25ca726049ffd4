"""Everything breaks at once, at random; afterwards every log and every state is compared."""
