"""Which entry should leave a full arena: policies on paper, played against the published skew, with and without a scan.

`python -m loadtest.eviction --plot docs/eviction.png` draws what the choice in `tao.cache.eviction` rests on."""
