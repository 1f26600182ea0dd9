#!/bin/sh
# Builds .venv-vllm, an environment with vLLM for CPUs: see setup-engine.sh.
exec sh "$(dirname "$0")/setup-engine.sh" vllm
