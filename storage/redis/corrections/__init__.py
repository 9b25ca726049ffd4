"""What changes which events count, and for whom: undo, merge, erasure and repair."""
