"""When to draft and when to verify: acceptance estimates, step costs and policies."""
