"""Commands that launch jobs: the engine, what mpiddp is compared with, a folder per quantity."""
