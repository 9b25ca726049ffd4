"""LISA-Mini, read top to bottom, and the parts it is made of."""
