"""Gluon kernels for Hopper (sm_90): the nouns of `kernels`, with loaders, rings and consumers in the open."""
