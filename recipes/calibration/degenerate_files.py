"""Real files that are degenerate by what they hold: the gate is right about them, and here is why.

They are listed by name and counted apart, never dropped: the rates are given with and without them. A
file is one of these where the name it was collected under ends so.
"""

_EMPTY = "The font ends in {} empty glyphs: the same few characters, line after line."

DEGENERATE_FILES: dict[str, str] = {
    "/fonts/amc_slash.flf": _EMPTY.format(11),
    "/fonts/amc_untitled.flf": _EMPTY.format(11),
    "/fonts/calgphy2.flf": _EMPTY.format(5),
    "/fonts/isometric4.flf": _EMPTY.format(11),
    "/fonts/mayhem_d.flf": _EMPTY.format("more than 20"),
    "/fonts/univers.flf": _EMPTY.format(7),
    "/fonts/yie-ar__.flf": _EMPTY.format(22),
    "/fonts/f15_____.flf": "The font's last four glyphs are one filled box: one line over 30 times.",
    "/CORE/sbox32_hash.h": "Generated: 256 macros that differ by a number which falls by one.",
    "/preferences-desktop-appearance-symbolic.svg": "Embeds empty images: the letter A 3,822 times in a row.",
    "/predict_prob_poisson.csv": "Equal rows: one of 2,000 characters five times, the next seven times.",
}
