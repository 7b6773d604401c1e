"""Image files to pixels: names, headers, decoding, resampling, and the view a backbone sees."""
