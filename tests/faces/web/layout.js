// Returns the faults of a page's layout: what is too wide, too narrow, cut off, or lies over something else.
const faults = [];
const width = document.documentElement.clientWidth;
const boxOf = (element) => element.getBoundingClientRect();
const isSeen = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && boxOf(element).width > 0;
const name = (element) => `<${element.tagName.toLowerCase()} class="${element.getAttribute("class") || ""}"> ${element.textContent.trim().slice(0, 40)}`;

if (document.documentElement.scrollWidth > width) {
  faults.push(`the page is ${document.documentElement.scrollWidth} wide`);
}
for (const cell of document.querySelectorAll("main td, main th")) {
  const ruler = cell.appendChild(document.createElement("span"));
  ruler.textContent = "00000000";
  ruler.style.position = "absolute";
  const least = boxOf(ruler).width;
  ruler.remove();
  if (isSeen(cell) && !cell.matches(".tick") && boxOf(cell).width < least) {
    faults.push(`a cell is narrower than 8 characters: ${name(cell)}`);
  }
}
for (const each of document.querySelectorAll("button, summary, label.menu, .top a, .tabs a, input:not([type=hidden])")) {
  if (isSeen(each) && (boxOf(each).left < 0 || boxOf(each).right > width + 0.5)) {
    faults.push(`outside of the window: ${name(each)}`);
  }
}
const stands = (element) => isSeen(element) && !["inline", "contents"].includes(getComputedStyle(element).display)
  && ["static", "relative"].includes(getComputedStyle(element).position);
for (const parent of document.querySelectorAll("body, body *:not(svg, svg *)")) {
  const children = [...parent.children].filter(stands);
  for (const [index, one] of children.entries()) {
    for (const other of children.slice(index + 1)) {
      const [a, b] = [boxOf(one), boxOf(other)];
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1) {
        faults.push(`one box lies over another: ${name(one)} and ${name(other)}`);
      }
    }
  }
}
return faults;
