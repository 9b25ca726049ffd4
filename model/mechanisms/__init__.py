"""Attention mechanisms side by side: one file each behind one interface, trained and compared by the same code.

``mechanism``   the interface: ``feature``, ``read`` and a parallel ``forward`` that equals stepping
``histograms``  LISA with learned codes: Base, Soft and Mini
``linear``      linear attention and gated linear attention
``interests``   LightSANs
``softmax``     softmax attention, which needs the whole history
``quantiser``   items to learned codes
``network``     the network around a mechanism: embeddings, positions, the block, the targets

S   histories of a batch, padded at the end    L   their length
U   distinct items of a batch                  the other letters are those of ``model``
"""
