"""Embed: features of any number of images, in shards that survive a kill."""
