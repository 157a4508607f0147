"""One offline HTML page over a run or a sweep: ``records`` reads, ``*_page`` arranges, ``render`` writes."""
