"""The CUDA engine: kernels specialised at run time (jit), launched with little host time (launch), chosen by a model.

Importing these modules needs neither a GPU nor CUDA's Python packages; what does is imported on first use.
"""
