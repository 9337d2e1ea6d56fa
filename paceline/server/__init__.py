"""The HTTP server: OpenAI's and Anthropic's interfaces over `AsyncLLM`, with vLLM's names for flags and metrics."""
