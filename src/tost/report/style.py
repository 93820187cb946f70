"""How the page looks: no font and no file from outside, light or dark as the reader's system is, plain on paper."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --soft: #55606b; --line: #d4dae0; --panel: #f4f6f8;
  --accent: #0b5cad; --warn: #8a3b00; --warn-panel: #fff3e6; --best: #e7f4ea;
  --s0: #c44601; --s1: #0067a5; --s2: #00754f; --s3: #9b3fa0; --s4: #8a6100; --s5: #3d4650; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181c; --ink: #e8ecf0; --soft: #a9b4bf; --line: #3a434c;
  --panel: #1e242a; --accent: #7db8f5; --warn: #ffc185; --warn-panel: #33230f; --best: #17321f;
  --s0: #ff8f4d; --s1: #6bb8f0; --s2: #4cc79a; --s3: #e08be6; --s4: #e0b64a; --s5: #c3ccd5; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 66rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.35rem; margin: 2.75rem 0 .5rem; padding-top: .75rem; border-top: 2px solid var(--line); }
h3 { font-size: 1.1rem; margin: 1.75rem 0 .4rem; overflow-wrap: anywhere; }
h4 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p { margin: .5rem 0; max-width: 46rem; overflow-wrap: anywhere; }
a { color: var(--accent); }
nav ul { list-style: none; padding: 0; margin: .75rem 0 0; display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; }
.lead { color: var(--soft); }
.note, .warning { border-left: .3rem solid var(--accent); background: var(--panel); padding: .5rem .8rem; }
.warning { border-color: var(--warn); background: var(--warn-panel); color: var(--warn); }
.verdict { font-weight: 600; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .93rem; min-width: 50%; }
caption { text-align: left; color: var(--soft); padding: 0 0 .35rem; font-size: .93rem; }
caption span { display: inline-block; max-width: calc(100vw - 2.5rem); }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody th { font-weight: 600; min-width: 8rem; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
.n { text-align: right; min-width: 3.5rem; font-variant-numeric: tabular-nums; padding: .3rem 0 .3rem .9rem; }
td.n { white-space: nowrap; }
tr.best > * { background: var(--best); }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .2rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: .3rem; padding: .7rem .8rem;
  margin: .5rem 0; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem;
  line-height: 1.45; }
pre b { color: var(--accent); }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--accent); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 23rem), 1fr)); gap: 1rem 1.75rem; }
figure { margin: .75rem 0; }
figcaption { font-weight: 600; margin-bottom: .25rem; }
.picture { margin: .75rem 0; }
.picture img { display: block; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: .3rem; }
.chart svg { display: block; width: 100%; height: auto; }
.chart p { color: var(--soft); font-size: .88rem; margin: .2rem 0; }
.chart text { fill: var(--soft); font-size: 12.5px; font-family: inherit; }
.chart .end { text-anchor: end; } .chart .middle { text-anchor: middle; }
.grid { stroke: var(--line); fill: none; } .axis { stroke: var(--soft); fill: none; }
.legend { list-style: none; padding: 0; margin: .25rem 0; display: flex; flex-wrap: wrap; gap: .1rem 1rem;
  font-size: .9rem; }
.legend li { display: flex; align-items: center; gap: .4rem; } .legend svg { flex: none; width: 28px; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.thin .line { stroke-width: 1.3; opacity: .75; } .dashed .line { stroke-dasharray: 5 4; }
.cross { stroke-width: 2; fill: none; }
.s0 { stroke: var(--s0); fill: var(--s0); } .s1 { stroke: var(--s1); fill: var(--s1); }
.s2 { stroke: var(--s2); fill: var(--s2); } .s3 { stroke: var(--s3); fill: var(--s3); }
.s4 { stroke: var(--s4); fill: var(--s4); } .s5 { stroke: var(--s5); fill: var(--s5); }
footer { margin-top: 3rem; border-top: 2px solid var(--line); padding-top: .75rem; color: var(--soft);
  font-size: .9rem; }
@media (max-width: 36rem) { dl { grid-template-columns: 1fr; } dd { margin: 0 0 .4rem; } h1 { font-size: 1.4rem; } }
@media print { :root { --paper: #ffffff; --ink: #000000; --soft: #444444; --line: #bbbbbb; --panel: #f6f6f6;
    --accent: #003d7a; --warn: #6b2d00; --warn-panel: #ffffff; --best: #eeeeee; --s0: #c44601; --s1: #0067a5;
    --s2: #00754f; --s3: #9b3fa0; --s4: #8a6100; --s5: #3d4650; }
  body { max-width: none; padding: 0; font-size: 10.5pt; } nav, details:not([open]) { display: none; }
  h2, h3, h4 { break-after: avoid; } figure, tr, .picture, dl { break-inside: avoid; } .scroll { overflow: visible; }
  table { font-size: 8.5pt; } caption span { max-width: none; } .n { padding-left: .7rem; }
  pre { white-space: pre-wrap; } .charts { grid-template-columns: 1fr 1fr; } @page { margin: 16mm; } }
"""
