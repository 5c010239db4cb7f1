"""Configuration of the servers around `scd_trt`: files of TensorRT-LLM that carry an `scd:` section."""
