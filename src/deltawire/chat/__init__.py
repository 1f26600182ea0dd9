"""Chat templates, tool calls and the OpenAI-compatible endpoint of one worker."""
