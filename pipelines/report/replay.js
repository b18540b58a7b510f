"use strict";
/* Plays texts side by side, at the pace at which they were measured or slower. */

const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

/* Milliseconds that the slower side takes at least, where a slower pace is offered. */
const WATCHED = 4000;

/* What a panel shows: pieces with the milliseconds at which they came, their total, and what is said at the end. */
function shownIn(panel) {
  return {
    facts: panel.querySelector(".facts"),
    bar: panel.querySelector("progress"),
    total: Number(panel.querySelector(".facts").dataset.total),
    pieces: all("[data-at]", panel).map((node) => ({ node, at: Number(node.dataset.at) })),
    text: panel.querySelector(".text").textContent,
  };
}

/* A player with the controls of `box`; it tells `ended` whether its runs are shown to their end. */
function player(box, ended) {
  const [pace, play, restart] = [".pace", ".play", ".restart"].map((name) => box.querySelector(name));
  let runs = [], end = 0, now = 0, last = null;

  function draw() {
    for (const run of runs) {
      const done = now >= run.total, elapsed = `${Math.min(now, run.total).toFixed(0)} ms`;
      for (const { node, at } of run.pieces) node.classList.toggle("coming", !done && at > now);
      run.facts.textContent = done ? `${elapsed}: ${run.facts.dataset.facts}` : elapsed;
      run.bar.max = end;
      run.bar.value = Math.min(now, run.total);
    }
    play.textContent = last === null ? "Play" : "Pause";
    ended(now >= end);
  }

  function step(time) {
    if (last === null) return;
    now = Math.min(end, now + Math.max(0, time - last) * Number(pace.value));
    last = now < end ? time : null;
    draw();
    if (last !== null) requestAnimationFrame(step);
  }

  function start(from) {
    const running = last !== null;
    [now, last] = [from, performance.now()];
    draw();
    if (!running) requestAnimationFrame(step);
  }

  function pause() {
    last = null;
    draw();
  }

  play.addEventListener("click", () => (last === null ? start(now < end ? now : 0) : pause()));
  restart.addEventListener("click", () => start(0));
  return {
    pause,
    /* Show other panels, to their end. */
    show(panels) {
      runs = panels.map(shownIn);
      now = end = Math.max(...runs.map((run) => run.total));
      pause();
    },
    /* Play them at the fastest pace that can be seen, unless the reader wants less motion. */
    watch() {
      const slow = [...pace.options].find((one) => end / Number(one.value) >= WATCHED);
      pace.value = (slow ?? pace.options[pace.options.length - 1]).value;
      if (!matchMedia("(prefers-reduced-motion: reduce)").matches) start(0);
    },
  };
}
