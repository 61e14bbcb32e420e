"""The shipped models, and adapters for anybody's."""
