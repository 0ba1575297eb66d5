"""Programs that teach: complete, small and meant to be read and changed."""
