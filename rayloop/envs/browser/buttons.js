// Presses a phone's button (home, back, menu, recent), or opens an app (open, and its name).
// A page that has an object `phone` with such a function does it itself, unless the function returns false.
// Returns {url} to load, {url, again} to be asked again there, {back: true} for the page before, {error}, or {}.
([name, value]) => {
  const own = window.phone?.[name]
  if (typeof own === 'function' && own(value) !== false) return {}
  const home = new URL('/', location).href
  const isHome = ['/', '/index.html'].includes(location.pathname) && !location.hash
  if (name === 'home') return { url: home }
  if (name === 'back') {
    if (isHome) return {}
    // What lies behind the page that an episode began at is the home page.
    return navigation.canGoBack ? { back: true } : { url: home }
  }
  if (name !== 'open') return { error: `this phone has no ${name} button` }
  if (!isHome) return { url: home, again: true }
  const label = link => (link.getAttribute('aria-label') ?? link.textContent).trim()
  const apps = [...document.querySelectorAll('a[href]')]
  const app = apps.find(link => label(link).toLowerCase() === value.trim().toLowerCase())
  if (app) return { url: app.href }
  return { error: `there is no app '${value}'; there are ${apps.slice(0, 20).map(label).join(', ')}` }
}
