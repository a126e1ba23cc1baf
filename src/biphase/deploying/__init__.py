"""A model's other forms: ONNX, a plain Llama, GGUF, a smaller vocabulary; the checks of what a form computes."""
