/*
 * How srun hears the run's exit code: one line, `everstep TOKEN CODE`, on a socket of its own.
 *
 * The token is made for this step alone and travels in its environment, so nobody else can end the run. A step that is
 * still there some time after its run has ended is ended: Slurm itself waits for a dead node much longer.
 */
#include "everstep.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define TOKEN_BYTES 32
#define LINE_SIZE 128
#define LINE_MS 1000     /* for a caller's whole line */
#define OVERDUE_MS 10000 /* that a step may outlive its run; as in launcher/step.py */

static struct {
	int listener, stop;
	char token[2 * TOKEN_BYTES + 1];
	int told; /* read once the thread is gone */
	pthread_t thread;
} ear = { .listener = -1, .stop = -1, .told = -1 };

/* PURE. The code in a line, 0 to 255: 0, or -1 for a line that is none of ours. */
int ear_parse(const char *line, const char *token, int *code)
{
	static const char greeting[] = "everstep ";
	size_t length = strlen(token), differs = 0;
	int number = 0, digits = 0;

	if (strncmp(line, greeting, sizeof(greeting) - 1) != 0)
		return -1;
	line += sizeof(greeting) - 1;
	if (strlen(line) < length + 2 || !length)
		return -1;
	for (size_t i = 0; i < length; i++) /* always all of it: how long it takes tells nothing */
		differs |= (size_t)(line[i] ^ token[i]);
	line += length;
	if (differs || *line++ != ' ')
		return -1;
	for (; *line >= '0' && *line <= '9' && digits < 4; line++, digits++)
		number = 10 * number + (*line - '0');
	if (!digits || *line != '\n' || line[1] || number > 255)
		return -1;
	*code = number;
	return 0;
}

static int64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* One caller: its line, if it comes in time. */
static void hear(int caller)
{
	char line[LINE_SIZE] = "";
	size_t length = 0;
	int64_t until = now_ms() + LINE_MS;

	while (length < sizeof(line) - 1 && !memchr(line, '\n', length)) {
		struct pollfd fds = { .fd = caller, .events = POLLIN };
		int64_t left = until - now_ms();
		ssize_t got = 0;

		if (left <= 0 || poll(&fds, 1, (int)left) <= 0)
			break;
		if ((got = recv(caller, line + length, sizeof(line) - 1 - length, 0)) <= 0)
			break;
		length += (size_t)got;
	}
	line[length] = '\0';
	if (ear.told < 0)
		ear_parse(line, ear.token, &ear.told);
}

static void *listen_on(void *unused)
{
	int64_t overdue = 0;
	int last_calls = 8; /* those who have called before the end are heard, but not for ever */
	bool said = false;

	while (true) {
		struct pollfd fds[] = { { .fd = ear.stop, .events = POLLIN }, { .fd = ear.listener, .events = POLLIN } };
		int64_t left = overdue ? overdue - now_ms() : -1;
		int caller = -1;

		if (overdue && left <= 0) {
			if (!said)
				fprintf(stderr,
					"everstep: the run is over and some agents are still there: ending the step\n");
			said = true;
			kill(getpid(), SIGTERM); /* srun's own signal thread takes it */
			left = OVERDUE_MS;
			overdue = now_ms() + left;
		}
		if (poll(fds, 2, (int)left) < 0 && errno != EINTR)
			break;
		if (fds[0].revents && (!(fds[1].revents & POLLIN) || !last_calls--))
			break;
		if (!(fds[1].revents & POLLIN))
			continue;
		if ((caller = accept4(ear.listener, NULL, NULL, SOCK_CLOEXEC)) < 0)
			continue;
		hear(caller);
		close(caller);
		if (ear.told >= 0 && !overdue)
			overdue = now_ms() + OVERDUE_MS;
	}
	return unused;
}

static int make_token(char *token)
{
	unsigned char bytes[TOKEN_BYTES];

	if (getrandom(bytes, sizeof(bytes), 0) != (ssize_t)sizeof(bytes))
		return -1;
	for (size_t i = 0; i < sizeof(bytes); i++)
		snprintf(token + 2 * i, 3, "%02x", bytes[i]);
	return 0;
}

static int start_thread(void)
{
	sigset_t all, before;
	int failed = 0;

	sigfillset(&all); /* signals are srun's */
	pthread_sigmask(SIG_SETMASK, &all, &before);
	failed = pthread_create(&ear.thread, NULL, listen_on, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return failed ? -1 : 0;
}

/* A socket on a port of the system's choice; -1 where there is none. */
static int listener_open(unsigned *port)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	socklen_t size = sizeof(address);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0)
		return -1;
	if (bind(fd, (struct sockaddr *)&address, size) < 0 || listen(fd, 8) < 0 ||
	    getsockname(fd, (struct sockaddr *)&address, &size) < 0) {
		close(fd);
		return -1;
	}
	*port = ntohs(address.sin_port);
	return fd;
}

/* Listen, and say where in the environment that the step's tasks will get. */
int ear_open(void)
{
	char host[256] = "", report[512];
	unsigned port = 0;
	int listener = -1, stop = -1;

	if (gethostname(host, sizeof(host) - 1) < 0 || make_token(ear.token) < 0)
		return -1;
	if ((listener = listener_open(&port)) < 0)
		return -1;
	if ((stop = eventfd(0, EFD_CLOEXEC)) < 0) {
		close(listener);
		return -1;
	}
	ear.listener = listener;
	ear.stop = stop;
	snprintf(report, sizeof(report), "line:%s:%u:%s", host, port, ear.token);
	if (setenv(VAR_REPORT, report, 1) == 0 && start_thread() == 0)
		return 0;
	close(stop);
	close(listener);
	return -1;
}

/* Stop listening: the code that was heard, or -1. */
int ear_close(void)
{
	uint64_t one = 1;

	if (write(ear.stop, &one, sizeof(one)) == (ssize_t)sizeof(one))
		pthread_join(ear.thread, NULL);
	close(ear.stop);
	close(ear.listener);
	return ear.told;
}

/* Tell an ear (line:HOST:PORT:TOKEN) from a node; the launcher does the same in launcher/report.py. */
int ear_tell(const char *report, int code)
{
	struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM }, *found = NULL;
	struct timeval patience = { .tv_sec = LINE_MS / 1000 };
	char host[256] = "", port[8] = "", token[2 * TOKEN_BYTES + 1] = "", line[LINE_SIZE];
	int sock = -1, length = 0, rc = -1;

	if (sscanf(report, "line:%255[^:]:%7[0-9]:%64[0-9a-f]", host, port, token) != 3)
		return -1;
	length = snprintf(line, sizeof(line), "everstep %s %d\n", token, code);
	if (getaddrinfo(host, port, &hints, &found) != 0)
		return -1;
	sock = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (sock >= 0) {
		setsockopt(sock, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
		if (connect(sock, found->ai_addr, found->ai_addrlen) == 0 &&
		    send(sock, line, (size_t)length, MSG_NOSIGNAL) == length)
			rc = 0;
		close(sock);
	}
	freeaddrinfo(found);
	return rc;
}
