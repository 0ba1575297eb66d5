"""Command lines of the library, installed as console scripts."""
