"""Functions over whole arrays: map, filter, reduction, scans, sorts, histograms. In: arrays of any library; out: arrays of the same one."""
