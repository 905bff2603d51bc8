"""The door: OpenAI-compatible HTTP and gRPC in, frames from replicas back."""
