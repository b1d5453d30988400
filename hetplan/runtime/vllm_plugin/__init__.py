"""Plugins that vLLM loads in its own environment: only stdlib, torch and vllm are imported here."""
