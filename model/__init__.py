"""LISA-Mini: data, codes, attention, training, evaluation, tables, engine, artifact.

The dimension legend, used at every reshape of this package:

Q   users in a batch (or positions of packed histories, in training)
R   decay rates
B   history codebooks        W   their codewords
B'  target codebooks         W'  their codewords (``P`` and ``V`` in code)
D   width of the model
N   items of the catalogue
L   length of one user's history
k   results asked for
"""
