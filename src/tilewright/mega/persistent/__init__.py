"""From the programs of a tensor graph to one persistent kernel: blocks that stay, walk the ops in order, and wait for counters in device memory."""
