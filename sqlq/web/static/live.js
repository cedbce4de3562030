// Refreshes the parts of a page that are marked with data-live, while somebody looks at it. All else works without this file.
"use strict";

const SECONDS = 3;
const MOST_SECONDS = 60;
let wait = SECONDS;

function isInUse(part) {
  return part.contains(document.activeElement) && document.activeElement !== part
    || part.querySelector("input:checked, details[open]") !== null
    || [...part.querySelectorAll("input:not([type=hidden]):not([type=checkbox])")].some((field) => field.value !== field.defaultValue);
}

function replaceParts(page) {
  for (const part of document.querySelectorAll("[data-live]")) {
    const fresh = page.getElementById(part.id);
    if (fresh && !isInUse(part) && part.innerHTML !== fresh.innerHTML) {
      const scrolled = [...part.querySelectorAll(".scroll")].map((each) => [each.scrollLeft, each.scrollTop]);
      part.replaceChildren(...fresh.childNodes);
      part.querySelectorAll(".scroll").forEach((each, i) => { [each.scrollLeft, each.scrollTop] = scrolled[i] || [0, 0]; });
    }
  }
}

async function refresh() {
  const again = document.querySelector("[data-again]");
  if (document.visibilityState === "visible" && (again || document.querySelector("[data-live]"))) {
    const stale = document.getElementById("stale");
    try {
      const answer = await fetch(location.href, { headers: { "X-Sqlq-Live": "1" }, redirect: "error" });
      if (again && answer.ok) {
        location.reload();
        return;
      }
      if (!answer.ok) throw new Error(answer.status);
      replaceParts(new DOMParser().parseFromString(await answer.text(), "text/html"));
      stale.hidden = true;
      wait = SECONDS;
    } catch {
      stale.hidden = Boolean(again);
      wait = Math.min(wait * 2, MOST_SECONDS);
    }
  }
  setTimeout(refresh, wait * 1000);
}

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-all]")) {
    for (const box of event.target.closest("table").querySelectorAll("tbody input[type=checkbox]")) {
      box.checked = event.target.checked;
    }
  }
});
// the bar of actions sticks below the header, whose height depends on the width
new ResizeObserver(([top]) => document.documentElement.style.setProperty("--top", `${top.target.offsetHeight}px`)).observe(document.querySelector(".top"));
document.addEventListener("visibilitychange", () => { wait = SECONDS; });
setTimeout(refresh, wait * 1000);

// A graph wider or taller than its box begins at the step that matters.
for (const box of document.querySelectorAll(".around, .flow-graph")) {
  const step = box.querySelector(".here") || box.querySelector(".failed") || box.querySelector(".running");
  if (step) {
    const at = step.getBoundingClientRect();
    const all = box.getBoundingClientRect();
    if (at.right > all.right) box.scrollLeft = at.left - all.left - (all.width - at.width) / 2;
    if (at.bottom > all.bottom) box.scrollTop = at.top - all.top - (all.height - at.height) / 2;
  }
}
