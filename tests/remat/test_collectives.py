"""Collectives of a program: by kind, trips of loops counted."""

from jaxft.remat.collectives import Collective, count_collectives

HLO = """\
HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %g = bf16[16,4]{1,0} all-gather(%x), dimensions={0}
  %r = (f32[2,4]{1,0}, f32[2]{0}) reduce-scatter(%y, %z), to_apply=%add
}

%cond (p: (s32[], f32[8,4])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p0: f32[8,4]) -> f32[8,4] {
  %w = (s32[], f32[8,4]) while(%t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
  %s = (f32[4]{0}, f32[16]{0}) all-gather-start(%v), dimensions={0}
  %d = f32[16]{0} all-gather-done(%s)
  ROOT %all = f32[8,4]{1,0} all-reduce(%q), to_apply=%add
}
"""


def test_counts_kinds_bytes_and_trips():
    assert count_collectives(HLO) == (
        Collective(kind="all-gather", count=13, num_bytes=12 * 16 * 4 * 2 + 16 * 4),
        Collective(kind="all-reduce", count=1, num_bytes=8 * 4 * 4),
        Collective(kind="reduce-scatter", count=12, num_bytes=12 * (8 + 2) * 4),
    )


def test_trips_are_read_off_the_condition_where_nobody_says_them():
    text = HLO.replace(', backend_config={"known_trip_count":{"n":"12"}}', "")
    text = text.replace("  ROOT %lt", "  %n = s32[]{:T(128)} constant(12)\n  ROOT %lt")
    assert count_collectives(text) == count_collectives(HLO)


def test_a_program_without_any():
    assert count_collectives("ENTRY %main () -> f32[] {\n  %a = f32[] add(%b)\n}") == ()
