"""Attention over work items: the kernels under ``tree_attention_jax``.

Nothing here knows what a tree is. A kernel sees *items*: a contiguous range of query rows times a list of
K/V entries (:mod:`pallas_kernels.layout` is the contract). Each kernel file stands beside the plain XLA
version it must equal:

=====================  ====================  =======================  ==================================
what                   plain XLA             Pallas, Triton backend   Pallas, Mosaic GPU backend
=====================  ====================  =======================  ==================================
partial attention      ``partial_xla.py``    ``partial_triton.py``    ``partial_mosaic.py``, ``mosaic_*``
reduction              ``reduce_xla.py``     ``reduce_triton.py``     ``reduce_mosaic.py``
append to the cache    ``append_xla.py``     ``append_triton.py``     the Triton one
=====================  ====================  =======================  ==================================
"""
