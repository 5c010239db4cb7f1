"""Semantic Cache Distillation for disaggregated LLM serving (arXiv 2606.07684).

The prefill server of model A sends compact codes of its KV cache; the decode server of model B turns them into its own
KV pages. See docs/ for the architecture and `scd-trt --help` for the command line.
"""

__version__ = "0.1.0"
